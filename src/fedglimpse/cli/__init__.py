"""The command `fedglimpse`: one file for each subcommand, put together in `main.py`.

Begin with `entry.py` (what runs before torch is imported), then `main.py`. May import every room;
no room imports this one.
"""
