"""An adapter that somebody saved, looked at before it meets a base."""
