"""`python -m headrace`, for where the script `headrace` is not on PATH."""

from headrace.cli import main

main()
