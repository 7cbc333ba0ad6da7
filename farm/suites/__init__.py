"""Task generation: bug operators, micro repositories, tasks from real packages, qualification."""
