//! What holds for a folder, whichever way it is read and written.

use super::{
    super::{DiskFolder, DiskOptions, DriverChoice, Folder, OpenError, PAGE, is_of_the_disk},
    bed::{content, filled, pattern},
};
use std::{io, os::unix::net::UnixListener, path::Path};

fn open(path: &Path) -> DiskFolder {
    let options = DiskOptions { driver: DriverChoice::Threads, ..DiskOptions::default() };
    // A process that another test starts holds the locks of this one for the moment between its fork and
    // its exec.
    for _ in 0..1000 {
        match DiskFolder::open(path, &options) {
            Err(OpenError::InUse { .. }) => std::thread::yield_now(),
            opened => return opened.unwrap(),
        }
    }
    DiskFolder::open(path, &options).unwrap()
}

#[test]
fn files_are_made_listed_opened_and_removed_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    assert_eq!(folder.list().unwrap(), []);
    filled(&folder, "b.seg", 1, 4 * PAGE);
    folder.create("a_log-1", PAGE as u64).unwrap();
    folder.sync().unwrap();
    let mut names = folder.list().unwrap();
    names.sort();
    let expected = [("a_log-1".to_owned(), PAGE as u64), ("b.seg".to_owned(), 4 * PAGE as u64)];
    assert_eq!(names, expected);
    assert!(content(&*folder.open("b.seg").unwrap()) == pattern(1, 4 * PAGE));

    let twice = folder.create("b.seg", PAGE as u64).unwrap_err();
    assert_eq!(twice.kind(), io::ErrorKind::AlreadyExists);
    folder.remove("b.seg").unwrap();
    assert_eq!(folder.open("b.seg").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(folder.remove("b.seg").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(folder.list().unwrap().len(), 1);
}

#[test]
fn a_file_tells_that_somebody_has_cut_it_or_taken_it_away() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    let [cut, gone] = ["cut", "gone"].map(|name| folder.create(name, 4 * PAGE as u64).unwrap());
    assert!(cut.is_whole() && gone.is_whole());
    let other = std::fs::OpenOptions::new().write(true).open(dir.path().join("cut")).unwrap();
    other.set_len(PAGE as u64).unwrap();
    std::fs::remove_file(dir.path().join("gone")).unwrap();
    assert!(!cut.is_whole() && !gone.is_whole());
}

#[test]
fn what_is_no_folder_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let [file, link] = ["file", "link"].map(|name| dir.path().join(name));
    std::fs::write(&file, "somebody's").unwrap();
    std::os::unix::fs::symlink(dir.path().join("nowhere"), &link).unwrap();
    for path in [&file, &link] {
        let refused = DiskFolder::open(path, &DiskOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("is no folder"), "{refused}");
        assert!(!refused.is_of_the_disk());
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"somebody's");
}

#[test]
fn names_that_are_no_plain_file_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    let long = "x".repeat(256);
    let names = ["", ".", "..", ".hidden", "a/b", "/a", "a b", "a\0b", "ä", "LOCK", &long];
    for name in names {
        for refused in [
            folder.create(name, PAGE as u64).map(drop),
            folder.open(name).map(drop),
            folder.remove(name),
        ] {
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }
    assert_eq!(folder.list().unwrap(), []);
}

#[test]
fn a_length_that_is_not_whole_pages_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    for len in [0, 1, PAGE as u64 + 512] {
        let error = folder.create("segment", len).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
    assert_eq!(folder.list().unwrap(), []);
}

#[test]
fn folders_and_links_of_others_are_neither_listed_nor_followed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    std::fs::create_dir(dir.path().join("lost+found")).unwrap();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
    assert_eq!(folder.list().unwrap(), []);
    assert!(folder.open("link").is_err());
    assert!(folder.open("folder").is_err());
}

#[test]
fn two_nodes_never_share_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let error = DiskFolder::open(dir.path(), &DiskOptions::default()).unwrap_err();
    assert!(
        matches!(error, OpenError::InUse { holder: Some(pid), .. } if pid == std::process::id())
    );
    let said = error.to_string();
    assert!(said.contains(dir.path().to_str().unwrap()), "{said}");
    assert!(said.contains(&format!("process {}", std::process::id())), "{said}");

    let file = first.create("segment", PAGE as u64).unwrap();
    let ended = first.ended();
    drop(first);
    let while_a_file_is_open = DiskFolder::open(dir.path(), &DiskOptions::default()).unwrap_err();
    assert!(matches!(while_a_file_is_open, OpenError::InUse { .. }));
    drop(file);
    ended.wait().unwrap();
    open(dir.path());
}

#[test]
fn a_disk_that_fails_is_told_from_a_folder_that_was_not_meant() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path| DiskFolder::open(path, &DiskOptions::default()).unwrap_err();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(!refused(&file).is_of_the_disk());
    assert!(!refused(&file.join("in")).is_of_the_disk());
    // What a device that is gone says.
    let _socket = UnixListener::bind(dir.path().join("LOCK")).unwrap();
    let gone = refused(dir.path());
    assert!(gone.is_of_the_disk(), "{gone:?}");

    let errors = [(libc::EIO, true), (libc::EROFS, true), (libc::ENOSPC, true)];
    let mistakes = [libc::EACCES, libc::EPERM, libc::ENOTDIR, libc::ELOOP, libc::EMFILE];
    let mistakes = mistakes.map(|errno| (errno, false));
    for (errno, of_the_disk) in errors.into_iter().chain(mistakes) {
        let error = io::Error::from_raw_os_error(errno);
        assert_eq!(is_of_the_disk(&error), of_the_disk, "{error}");
    }
}

#[test]
fn physical_bytes_are_those_that_the_file_system_gave() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path());
    let before = folder.physical_bytes().unwrap();
    folder.create("segment", 256 * PAGE as u64).unwrap();
    let with = folder.physical_bytes().unwrap();
    assert!(with >= before + 256 * PAGE as u64, "set aside before anything is written");
    assert!(with < before + 300 * PAGE as u64);
    // A sparse file takes less than its length.
    let sparse = std::fs::File::create(dir.path().join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    assert!(folder.physical_bytes().unwrap() < with + 64 * PAGE as u64);
    folder.remove("segment").unwrap();
    folder.remove("sparse").unwrap();
    assert!(folder.physical_bytes().unwrap() <= before + 16 * PAGE as u64);
}

#[test]
fn the_room_of_the_file_system_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let space = open(dir.path()).space().unwrap();
    assert!(space.free_bytes > 0 && space.free_bytes <= space.total_bytes, "{space:?}");
}
