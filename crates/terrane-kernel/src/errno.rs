//! Linux's error numbers.

/// An error number, as system calls return it (negated).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident $number:literal;)*) => {
        #[allow(missing_docs, reason = "they are Linux's")]
        #[allow(dead_code, reason = "the whole list, used or not")]
        impl Errno {
            $(pub const $name: Errno = Errno($number);)*
        }
    };
}

errnos! {
    EPERM 1; ENOENT 2; ESRCH 3; EINTR 4; EIO 5; ENXIO 6; E2BIG 7; ENOEXEC 8; EBADF 9; ECHILD 10; EAGAIN 11; ENOMEM 12;
    EACCES 13; EFAULT 14; ENOTBLK 15; EBUSY 16; EEXIST 17; EXDEV 18; ENODEV 19; ENOTDIR 20; EISDIR 21; EINVAL 22;
    ENFILE 23; EMFILE 24; ENOTTY 25; ETXTBSY 26; EFBIG 27; ENOSPC 28; ESPIPE 29; EROFS 30; EMLINK 31; EPIPE 32;
    EDOM 33; ERANGE 34; EDEADLK 35; ENAMETOOLONG 36; ENOLCK 37; ENOSYS 38; ENOTEMPTY 39; ELOOP 40; EOVERFLOW 75;
    EILSEQ 84; EUSERS 87; ENOTSOCK 88; EOPNOTSUPP 95; EAFNOSUPPORT 97; ETIMEDOUT 110; EALREADY 114; ECANCELED 125;
    EOWNERDEAD 130; ENOTRECOVERABLE 131;
    // Not for programs: a call that a signal interrupted, and that begins anew unless a handler says otherwise.
    ERESTARTSYS 512; ERESTARTNOINTR 513; ERESTARTNOHAND 514; ERESTART_RESTARTBLOCK 516;
}

impl From<terrane::Error> for Errno {
    fn from(error: terrane::Error) -> Self {
        Errno(error.errno())
    }
}

impl From<terrane::OutOfMemory> for Errno {
    fn from(_: terrane::OutOfMemory) -> Self {
        Errno::ENOMEM
    }
}

impl From<alloc::collections::TryReserveError> for Errno {
    fn from(_: alloc::collections::TryReserveError) -> Self {
        Errno::ENOMEM
    }
}
