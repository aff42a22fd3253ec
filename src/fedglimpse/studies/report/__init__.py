"""From a study to tables and to one page that can be read anywhere."""
