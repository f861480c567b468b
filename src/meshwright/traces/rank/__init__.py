"""One rank's trace: where its time and memory went."""
