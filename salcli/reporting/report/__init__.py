"""The report: one page of HTML that needs nothing but a browser."""
