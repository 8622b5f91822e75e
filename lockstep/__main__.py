"""python -m lockstep COMMAND …: the command `lockstep` of one Python, whatever is on the PATH."""

from lockstep.jobs.cli.main import main

if __name__ == "__main__":
    main()
