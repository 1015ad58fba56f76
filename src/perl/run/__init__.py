"""The folder of a run, how far it is, and what it runs on: device, threads, processes."""
