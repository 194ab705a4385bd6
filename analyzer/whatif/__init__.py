"""What-if questions: how long a step would take if something about a job were different."""
