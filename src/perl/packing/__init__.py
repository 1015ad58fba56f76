"""Why a step is fast: rows without padding, a shared prompt once, as many tokens at a time as memory holds."""
