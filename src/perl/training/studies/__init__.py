"""study file -> cells, each an ordinary run -> choices, scores, a report."""
