"""`python -m fedglimpse`."""

from fedglimpse.entry import main

main()
