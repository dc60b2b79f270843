//! One process per run directory: a lock on a file in it, which the kernel releases however its owner ends.

use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::PathBuf;
use std::time::Duration;

use super::Failure;
use super::run_dir::RunDir;

/// Exclusive right to work on a run. Dropping it removes the file, and the directory if that is empty.
pub struct RunLock {
    file: File,
    path: PathBuf,
}

impl RunLock {
    /// Locks the directory, creating it if absent; the error names the owner's pid.
    pub fn acquire(folder: &RunDir) -> Result<Self, Failure> {
        fs::create_dir_all(&folder.root).map_err(Failure::io("create the folder", &folder.root))?;
        let path = folder.root.join(LOCK_FILE);
        let failed = |source| Failure::Io { what: "lock", path: path.clone(), source };
        let mut retries = GRACE_PERIOD.as_millis() / RETRY_INTERVAL.as_millis();
        loop {
            let mut options = File::options();
            let mut file =
                options.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    // An owner that has just locked the file may not have written its pid yet.
                    let _ = file.read_to_string(&mut text);
                    let pid = text.trim().parse().ok();
                    if retries == 0 || pid.is_none_or(is_alive) {
                        return Err(Failure::Locked { folder: folder.root.clone(), pid });
                    }
                    // The owner is dead, but its worker still holds the lock and is about to exit.
                    retries -= 1;
                    std::thread::sleep(RETRY_INTERVAL);
                    continue;
                }
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            if !is_same_file(&file, &path) {
                // The previous owner removed the file after this process opened it.
                continue;
            }
            let written = file.set_len(0).and_then(|()| file.rewind());
            written.and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
            return Ok(Self { file, path });
        }
    }

    /// Whether a process works on the run now. Takes nothing: the shared lock that it tries is released at once.
    pub fn is_held(folder: &RunDir) -> bool {
        let file = File::open(folder.root.join(LOCK_FILE));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Lets child processes inherit the lock: a worker holds it until it exits, even if the supervisor dies first.
    #[cfg(unix)]
    pub fn share_with_children(&self) -> Result<(), Failure> {
        let flags = rustix::io::FdFlags::empty();
        rustix::io::fcntl_setfd(&self.file, flags).map_err(|e| Failure::io("lock", &self.path)(e.into()))
    }
}

/// Name of the file in the run's directory; it holds the owner's pid.
const LOCK_FILE: &str = "lock";

/// How long a worker may take to exit after its supervisor was killed.
const GRACE_PERIOD: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Whether a process is running; a zombie is not.
fn is_alive(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])),
        Err(_) => !fs::exists("/proc/self/stat").unwrap_or(false),
    }
}

/// Whether the open file is still the one at this path.
fn is_same_file(file: &File, path: &std::path::Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let inode = |about: fs::Metadata| (about.dev(), about.ino());
        file.metadata().map(inode).ok() == fs::metadata(path).map(inode).ok()
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Best effort: a leftover file is not locked. The lock is held during the removal; see `is_same_file`.
        let _ = fs::remove_file(&self.path);
        let _ = self.path.parent().map(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_owner_at_a_time_and_nothing_is_left() {
        let home = tempfile::tempdir().unwrap();
        let folder = RunDir::new(home.path().join("run"));
        let first = RunLock::acquire(&folder).unwrap();
        assert!(RunLock::is_held(&folder));
        match RunLock::acquire(&folder) {
            Err(Failure::Locked { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{:?}", other.err()),
        }
        drop(first);
        assert!(!folder.root.exists());
        // A file left by a killed owner does not lock anyone out.
        fs::create_dir(&folder.root).unwrap();
        fs::write(folder.root.join("lock"), "1\n").unwrap();
        assert!(!RunLock::is_held(&folder));
        fs::write(folder.root.join("job.toml"), "").unwrap();
        drop(RunLock::acquire(&folder).unwrap());
        assert!(folder.root.exists() && !folder.root.join("lock").exists());
    }
}
