"""Run folders: settings, metrics, results, progress and trackers. No torch."""
