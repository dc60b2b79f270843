//! Opens regular files, and never blocks.
//!
//! Every path named by a job or a command line is opened here. A FIFO without a writer would block forever, `/dev/zero`
//! never ends and a terminal waits for its user: anything but a regular file is refused at once. The type is checked on
//! the open file, so that nobody can swap the path in between.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens the regular file at `path` for reading. A directory gives [`ErrorKind::IsADirectory`], anything else that is
/// not a regular file [`ErrorKind::InvalidInput`].
pub fn open(path: &Path) -> io::Result<File> {
    let file = open_nonblocking(path)?;
    ensure_regular(&file)?;
    Ok(file)
}

/// The content of the regular file at `path`; an error if it is larger than `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let too_large = || {
        io::Error::new(
            ErrorKind::FileTooLarge,
            format!("it has over {max_bytes} bytes, too many for what it is"),
        )
    };
    if length > max_bytes {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // Do not read a file of length 0: some files below /proc claim it and block.
    file.take(if length == 0 { 0 } else { max_bytes + 1 }).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes { Err(too_large()) } else { Ok(bytes) }
}

/// Like [`read`], for UTF-8 text.
pub fn read_to_string(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Refuses an open file that is not a regular file.
pub fn ensure_regular(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    if kind.is_dir() {
        return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder, and a file is wanted"));
    }
    Err(not_regular(kind))
}

fn not_regular(kind: std::fs::FileType) -> io::Error {
    io::Error::new(
        ErrorKind::InvalidInput,
        format!("it is {}, and a regular file is wanted", file_type_name(kind)),
    )
}

#[cfg(unix)]
fn file_type_name(kind: std::fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "no regular file",
    }
}

#[cfg(not(unix))]
fn file_type_name(_: std::fs::FileType) -> &'static str {
    "no regular file"
}

/// Opens without waiting for the other end of a FIFO, and without acquiring a controlling terminal.
#[cfg(unix)]
fn open_nonblocking(path: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => Ok(file.into()),
        // A socket cannot be opened at all, nor a device file without a device.
        Err(error @ rustix::io::Errno::NXIO) => Err(std::fs::metadata(path)
            .map_or_else(|_| error.into(), |metadata| not_regular(metadata.file_type()))),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(unix))]
fn open_nonblocking(path: &Path) -> io::Result<File> {
    File::open(path)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Each file type is refused by name; a plain open of the FIFO would block this test forever.
    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink(path("fifo"), path("link")).unwrap();
        for (name, kind, wanted) in [
            (path("fifo"), ErrorKind::InvalidInput, "a pipe"),
            (path("link"), ErrorKind::InvalidInput, "a pipe"),
            (path("socket"), ErrorKind::InvalidInput, "a socket"),
            (path("folder"), ErrorKind::IsADirectory, "a folder"),
            ("/dev/zero".into(), ErrorKind::InvalidInput, "a device"),
            ("/dev/null".into(), ErrorKind::InvalidInput, "a device"),
            (path("none"), ErrorKind::NotFound, ""),
        ] {
            for error in [open(&name).unwrap_err(), read(&name, 9).unwrap_err()] {
                assert_eq!(error.kind(), kind, "{}: {error}", name.display());
                assert!(error.to_string().contains(wanted), "{}: {error}", name.display());
            }
        }
        std::fs::write(path("file"), "12345").unwrap();
        std::os::unix::fs::symlink(path("file"), path("to file")).unwrap();
        assert_eq!(read(&path("to file"), 5).unwrap(), b"12345");
        assert_eq!(read(&path("file"), 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
        // This file claims length 0, so nothing is read.
        assert_eq!(read(Path::new("/proc/self/status"), 9).unwrap_or_default(), b"");
    }
}
