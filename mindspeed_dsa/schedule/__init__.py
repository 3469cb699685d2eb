"""Pipeline schedules as lists of events, their simulation, and pictures of simulated and recorded steps."""
