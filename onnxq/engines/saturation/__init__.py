"""16-bit sums that saturate on x86 CPUs without VNNI: how often they do, and its cost, computed on any machine."""
