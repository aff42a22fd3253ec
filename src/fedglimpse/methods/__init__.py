"""Methods: one readable file each. `registry` finds them by name."""
