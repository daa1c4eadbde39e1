"""`python -m autoplan` is the command line."""

from autoplan.cli import main

if __name__ == "__main__":
    main()
