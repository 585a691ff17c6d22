"""`python -m d2f_hf` is `d2f`."""

from d2f_cli.main import main

if __name__ == "__main__":
    main()
