"""What a run leaves behind: its folder, metrics, results, progress and trackers. No torch."""
