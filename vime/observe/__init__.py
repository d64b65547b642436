"""What people see of a run: metrics, the console, the timeline and the report. Torch-free and cheap to import."""
