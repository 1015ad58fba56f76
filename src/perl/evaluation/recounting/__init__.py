"""Every figure again, from samples."""
