"""What the library can be used for, each in a file that runs."""
