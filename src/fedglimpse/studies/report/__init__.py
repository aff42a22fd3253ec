"""From a study to its numbers, and from these to a terminal, tables and one HTML page.

May import `config`, `runs`, `studies.results` and `studies.statistics`. Begin with `analysis.py`,
which computes everything that is shown; the other modules only write it down.
"""
