"""`python -m weft.cli` is the command `weft`."""

from weft.cli import main

main()
