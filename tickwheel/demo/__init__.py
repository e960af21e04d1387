"""What shows and measures the product from outside: the demonstration, `bench`, made-up history."""
