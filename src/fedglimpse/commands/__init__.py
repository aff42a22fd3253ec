"""The subcommands of `fedglimpse`, one file each; `cli.py` puts them together."""
