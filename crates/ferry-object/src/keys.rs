//! The key of an encrypted volume: wrapped by a passphrase, in an object `k/N`.
//!
//! The key is random and never changes. What a passphrase gives (argon2id) encrypts it, with the
//! table of `super` authenticated beside it. A new passphrase is a new object `k/(N+1)`, and the
//! older ones are deleted then: nothing else is written. Between the two steps both passphrases
//! open the volume.

use crate::access::{Access, Created, LIST_AGAIN, LISTS_MAX};
use crate::codec::KEY_LEN;
use crate::error::ObjectError;
use crate::format::{
    Id, KEYS, Kdf, Kind, Super, WrappedKey, encode, key_name, new_header, number_of, random_id,
};
use argon2::{Algorithm, Argon2, Params, Version};
use ferry_env::Env;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use std::fmt;
use zeroize::Zeroizing;

/// What opens an encrypted volume. It is cleared from memory when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Passphrase(Opens);

#[derive(Clone, PartialEq, Eq)]
enum Opens {
    /// The key is wrapped by it.
    Words(Zeroizing<Vec<u8>>),
    /// The key itself.
    Key(Secret),
}

/// It shows nothing of the passphrase.
impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl Passphrase {
    /// `None`: it is empty.
    pub fn new(bytes: Zeroizing<Vec<u8>>) -> Option<Self> {
        (!bytes.is_empty()).then_some(Self(Opens::Words(bytes)))
    }

    /// The key that a process had got by a passphrase, and that another one uses: the passphrase
    /// may have been changed since. It opens a volume, and nothing else can be done with it.
    /// `None`: that is no key.
    pub fn of_key(key: &[u8]) -> Option<Self> {
        let mut secret = Secret::default();
        (key.len() == KEY_LEN).then(|| {
            secret.copy_from_slice(key);
            Self(Opens::Key(secret))
        })
    }
}

/// How a new volume is encrypted.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// What opens it.
    pub passphrase: Passphrase,
    /// What it costs to try one.
    pub kdf: Kdf,
}

/// The volume that a key is of.
#[derive(Clone, Copy)]
pub(crate) struct Of<'a> {
    pub id: &'a Id,
    pub info: &'a Super,
}

pub(crate) type Secret = Zeroizing<[u8; KEY_LEN]>;

/// The key that wraps, from a passphrase.
fn wrapping(passphrase: &Passphrase, kdf: Kdf, salt: &[u8]) -> Result<LessSafeKey, ObjectError> {
    let Opens::Words(words) = &passphrase.0 else { return Err(ObjectError::WrongPassphrase) };
    let mut key = Secret::default();
    let params = Params::new(kdf.memory_kib, kdf.passes, 1, Some(KEY_LEN));
    params
        .and_then(|params| {
            Argon2::new(Algorithm::Argon2id, Version::V0x13, params).hash_password_into(
                words,
                salt,
                &mut key[..],
            )
        })
        .map_err(|error| {
            ObjectError::Setup(format!("no key can be made of the passphrase: {error}"))
        })?;
    let key = UnboundKey::new(&AES_256_GCM, &key[..]);
    Ok(LessSafeKey::new(key.expect("it is as long as a key of AES-256")))
}

/// A wrapping key has one salt, and so wraps once.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

/// What is authenticated beside the key: the volume and what `super` says of it.
fn associated(volume: Of<'_>) -> Aad<Vec<u8>> {
    Aad::from([&volume.id[..], &volume.info.encode()].concat())
}

fn wrap(
    volume: Of<'_>,
    key: &Secret,
    encryption: &Encryption,
    env: &Env,
) -> Result<WrappedKey, ObjectError> {
    let (kdf, salt) = (encryption.kdf, random_id(env));
    let mut sealed = [0; _];
    let (bytes, end) = sealed.split_at_mut(KEY_LEN);
    bytes.copy_from_slice(&key[..]);
    let tag = wrapping(&encryption.passphrase, kdf, &salt)?
        .seal_in_place_separate_tag(nonce(), associated(volume), bytes)
        .expect("a key is shorter than AES-GCM can seal");
    end.copy_from_slice(tag.as_ref());
    Ok(WrappedKey { kdf, salt, sealed })
}

/// `None`: it is another passphrase.
fn unwrap(
    volume: Of<'_>,
    wrapped: &WrappedKey,
    passphrase: &Passphrase,
) -> Result<Option<Secret>, ObjectError> {
    let wrapping = wrapping(passphrase, wrapped.kdf, &wrapped.salt)?;
    let mut bytes = Zeroizing::new(wrapped.sealed);
    let opened = wrapping.open_in_place(nonce(), associated(volume), &mut bytes[..]);
    Ok(opened.ok().map(|opened| {
        let mut key = Secret::default();
        key.copy_from_slice(opened);
        key
    }))
}

/// Numbers of the objects with the wrapped key, the newest first.
fn numbers(access: &Access) -> Result<Vec<u64>, ObjectError> {
    let listed = access.insist(|store| store.list(KEYS))?;
    let mut numbers: Vec<u64> = listed.iter().filter_map(|name| number_of(name)).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    Ok(numbers)
}

/// A volume's key that was unwrapped.
struct Found {
    key: Secret,
    /// What it cost.
    kdf: Kdf,
    /// The number of the newest object that wraps it.
    newest: u64,
}

/// What `read` finds. It gets the numbers of the objects that wrap the key, the newest first.
/// A list may lag, and an object may be deleted meanwhile: if nothing is found, it is asked again.
fn until_found<T>(
    access: &Access,
    read: impl Fn(&[u64]) -> Result<Option<T>, ObjectError>,
) -> Result<T, ObjectError> {
    for _ in 0..LISTS_MAX {
        if let Some(found) = read(&numbers(access)?)? {
            return Ok(found);
        }
        access.executor.pause(LIST_AGAIN);
    }
    let what = "the volume is encrypted, and the object with its key is not there";
    Err(ObjectError::Damaged { name: KEYS.into(), what })
}

/// The volume's key.
fn find(access: &Access, volume: Of<'_>, passphrase: &Passphrase) -> Result<Found, ObjectError> {
    until_found(access, |numbers| {
        let mut is_wrong = false;
        for number in numbers {
            let name = key_name(*number);
            let (front, table) = match access.table(&name) {
                Err(ObjectError::NotFound(_)) => continue,
                other => other?,
            };
            front.expect(Kind::Key, volume.id, *number)?;
            let wrapped = WrappedKey::decode(&name, &table)?;
            if let Some(key) = unwrap(volume, &wrapped, passphrase)? {
                return Ok(Some(Found { key, kdf: wrapped.kdf, newest: numbers[0] }));
            }
            is_wrong = true;
        }
        if is_wrong { Err(ObjectError::WrongPassphrase) } else { Ok(None) }
    })
}

/// Writes the wrapped key as object `number`.
pub(crate) fn write(
    access: &Access,
    volume: Of<'_>,
    number: u64,
    wrapped: &WrappedKey,
    env: &Env,
) -> Result<Created, ObjectError> {
    let header = new_header(Kind::Key, *volume.id, 0, number, env);
    access.create(&key_name(number), &encode(&access.codec, &header, &wrapped.encode(), &[]))
}

/// The key of an encrypted volume.
pub(crate) fn unlock(
    access: &Access,
    volume: Of<'_>,
    passphrase: Option<&Passphrase>,
) -> Result<Secret, ObjectError> {
    let passphrase = passphrase.ok_or(ObjectError::PassphraseWanted)?;
    if let Opens::Key(key) = &passphrase.0 {
        return Ok(key.clone());
    }
    Ok(find(access, volume, passphrase)?.key)
}

/// The key of an encrypted volume, and what wraps it for a clone, by the same passphrase.
pub(crate) fn rewrap(
    access: &Access,
    volume: Of<'_>,
    clone: Of<'_>,
    passphrase: &Passphrase,
    env: &Env,
) -> Result<(Secret, WrappedKey), ObjectError> {
    let Found { key, kdf, .. } = find(access, volume, passphrase)?;
    let passphrase = passphrase.clone();
    let wrapped = wrap(clone, &key, &Encryption { passphrase, kdf }, env)?;
    Ok((key, wrapped))
}

/// Gives a new volume its key. One that a process made before it ended is used if the passphrase is
/// the same.
pub(crate) fn make_key(
    access: &Access,
    volume: Of<'_>,
    encryption: &Encryption,
    env: &Env,
) -> Result<Secret, ObjectError> {
    let mut key = Secret::default();
    for part in key.chunks_exact_mut(size_of::<u64>()) {
        part.copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    }
    let wrapped = wrap(volume, &key, encryption, env)?;
    match write(access, volume, 0, &wrapped, env)? {
        Created::Ours => Ok(key),
        _ => unlock(access, volume, Some(&encryption.passphrase)),
    }
}

/// The newest object with the wrapped key, and its number.
pub(crate) fn newest_key(access: &Access) -> Result<(u64, Vec<u8>), ObjectError> {
    until_found(access, |numbers| {
        for number in numbers {
            match access.get(&key_name(*number), None) {
                // The passphrase is changed at this moment.
                Err(ObjectError::NotFound(_)) => {}
                bytes => return Ok(Some((*number, bytes?))),
            }
        }
        Ok(None)
    })
}

/// Takes over the newest wrapped key of the volume that this one is a copy of, if it is newer: what
/// opens that one opens this one, unless the passphrase was changed here alone. Older ones are
/// deleted in any case: a process may have been killed before it did.
pub(crate) fn take_key(access: &Access, number: u64, bytes: &[u8]) -> Result<(), ObjectError> {
    let there = numbers(access)?;
    if there.iter().all(|old| *old < number) {
        access.create(&key_name(number), bytes)?;
    }
    let newest = there.first().map_or(number, |old| number.max(*old));
    access.insist(|store| store.make_durable(&mut std::iter::once(key_name(newest))))?;
    for number in there.into_iter().filter(|old| *old < number) {
        access.insist(|store| store.delete(&key_name(number)))?;
    }
    Ok(())
}

/// From now on another passphrase opens the volume, and the old one does not.
pub(crate) fn change(
    access: &Access,
    volume: Of<'_>,
    old: &Passphrase,
    new: &Encryption,
    env: &Env,
) -> Result<(), ObjectError> {
    let Found { key, newest, .. } = find(access, volume, old)?;
    let wrapped = wrap(volume, &key, new, env)?;
    if write(access, volume, newest + 1, &wrapped, env)? != Created::Ours {
        return Err(ObjectError::Setup(
            "somebody else changes the passphrase at this moment: find out which one counts, then try again".into(),
        ));
    }
    for number in numbers(access)?.into_iter().filter(|number| *number <= newest) {
        access.insist(|store| store.delete(&key_name(number)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Patience;
    use crate::dir::DirStore;
    use crate::executor::ThreadExecutor;
    use crate::store::Store;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_newer_key_is_taken_over_and_no_older_one_stays_whenever_a_process_was_killed() {
        let env = Env::real();
        for (there, then) in [
            (vec![], vec![3]),
            (vec![1], vec![3]),
            (vec![3], vec![3]),
            (vec![1, 2, 3], vec![3]),
            (vec![2, 5], vec![5]),
        ] {
            let directory = tempfile::tempdir().expect("a directory");
            let store = DirStore::open(directory.path(), env.clone()).expect("it is there");
            for number in &there {
                store.put(&key_name(*number), b"old").expect("put");
            }
            let executor = ThreadExecutor::new(&env).expect("threads can be started");
            let patience = Patience::Opening(Duration::ZERO);
            let access = Access::new(Arc::new(store), Arc::new(executor), patience, &env);
            take_key(&access, 3, b"new").expect("it is taken");
            assert_eq!(numbers(&access), Ok(then), "{there:?}");
            assert_eq!(newest_key(&access).map(|(number, _)| number >= 3), Ok(true));
        }
    }
}
