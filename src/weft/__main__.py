"""`python -m weft` is the command `weft`."""

from weft.cli import main

main()
