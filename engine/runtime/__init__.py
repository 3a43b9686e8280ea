"""What the runtime did during a run: its record, goodput, the verdict, the report, and the watchdog."""
