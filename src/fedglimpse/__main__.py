"""`python -m fedglimpse`."""

from fedglimpse.cli import main

main()
