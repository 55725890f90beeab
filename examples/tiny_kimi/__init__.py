"""A miniature of Kimi K2.6 with its DFlash drafter, and the script that trained both."""
