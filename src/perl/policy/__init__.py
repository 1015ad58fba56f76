"""Base and adapter: how they are loaded, joined, compared, saved and named."""
