"""What people look at: tables, histograms, progress."""
