"""The stream of records from the program to the terminal, files and user-defined sinks."""
