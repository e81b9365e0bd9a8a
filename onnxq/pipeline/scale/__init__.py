"""Work spread over processes and machines, in one command or in many."""
