"""What an evaluation reports: each figure fed with real rows, combined once over ranks."""
