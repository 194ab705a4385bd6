"""Recording in C++, without the interpreter lock; compiled on the machine of the job."""
