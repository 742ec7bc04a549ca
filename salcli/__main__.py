"""`python -m salcli` is the same program as `salcli`."""

from salcli.cli import main

if __name__ == "__main__":
    main()
