"""`python -m gemq`."""

from gemq.cli import main

main()
