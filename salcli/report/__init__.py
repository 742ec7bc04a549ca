"""What people read: tables, figures, the paper's numbers and the HTML report."""
