"""One rank's trace: its time and its memory."""
