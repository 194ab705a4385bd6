"""What is recorded in C++, without the interpreter: it is compiled on the machine of the job."""
