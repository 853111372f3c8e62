"""`python -m trouper`."""

from trouper.frontends.cli.main import main

if __name__ == "__main__":
    main()
