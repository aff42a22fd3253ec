"""Methods: one file each."""
