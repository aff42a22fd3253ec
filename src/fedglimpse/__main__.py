"""`python -m fedglimpse`."""

from fedglimpse.cli.entry import main

main()
