"""Makes entries of the zoo out of adapters, evaluates entries again, and finds adapters on the Hub."""
