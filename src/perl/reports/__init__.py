"""Run folders as people look at them: one page in a browser, a live view in a terminal."""
