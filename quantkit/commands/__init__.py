"""The verbs: each module is a plain run(settings, progress) → report."""
