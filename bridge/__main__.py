"""`python -m bridge`: the same commands, where another program named bridge comes first on the path."""

from bridge.cli import main

if __name__ == "__main__":
    main(prog_name="python -m bridge")
