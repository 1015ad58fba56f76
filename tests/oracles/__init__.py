"""Independent few-line implementations, in plain Python and double precision, that numbers are checked against."""
