//! How values become bytes and back: little-endian, in order, nothing between; lists and bytes
//! begin with their count as `u32`.
//!
//! Decoding trusts nothing: it reads what is there or fails, takes no more memory than a small
//! multiple of what came, and never panics. Written by hand instead of with prost: no generator at
//! build time, no optional field whose absence somebody must think of, and one place where every
//! bound is checked.

use ferry_fs::{Attr, FileLock, RenameFlags, SetAttr, SetTime, Statfs, Timestamp, XattrFlags};

/// What came is no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a malformed message")]
pub struct Malformed;

/// What is left of a message.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    /// A list's count; each of its values takes a byte at least.
    fn count(&mut self) -> Result<usize, Malformed> {
        let count = u32::get(self)? as usize;
        if count > self.0.len() { Err(Malformed) } else { Ok(count) }
    }
}

/// A value that travels.
pub trait Wire: Sized {
    /// Appends it.
    fn put(&self, out: &mut Vec<u8>);
    /// Takes it off the front.
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed>;
}

/// A whole message; bytes left over are an error.
pub fn decode<T: Wire>(bytes: &[u8]) -> Result<T, Malformed> {
    let mut input = Input::new(bytes);
    let value = T::get(&mut input)?;
    if input.0.is_empty() { Ok(value) } else { Err(Malformed) }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Wire for $t {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
                let bytes = input.take(size_of::<$t>())?;
                Ok(Self::from_le_bytes(bytes.try_into().map_err(|_| Malformed)?))
            }
        }
    )*};
}
integers!(u8, u32, u64, u128, i32, i128);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        match u8::get(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }
}

impl Wire for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let len = input.count()?;
        Ok(input.take(len)?.to_vec())
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        if bool::get(input)? { T::get(input).map(Some) } else { Ok(None) }
    }
}

/// A list, of anything but bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Wire> Wire for List<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).put(out);
        self.0.iter().for_each(|value| value.put(out));
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let count = input.count()?;
        // Not reserved at once: the values may be larger in memory than what came.
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(T::get(input)?);
        }
        Ok(Self(values))
    }
}

impl Wire for Timestamp {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let nanos = i128::get(input)?;
        // What 64 bits of seconds can say.
        let secs = nanos.div_euclid(1_000_000_000);
        if i64::try_from(secs).is_ok() { Ok(Self(nanos)) } else { Err(Malformed) }
    }
}

impl Wire for SetTime {
    fn put(&self, out: &mut Vec<u8>) {
        let at = match self {
            SetTime::Now => None,
            SetTime::At(time) => Some(*time),
        };
        at.put(out);
    }
    fn get(input: &mut Input<'_>) -> Result<Self, Malformed> {
        Ok(Option::<Timestamp>::get(input)?.map_or(SetTime::Now, SetTime::At))
    }
}

/// Implements [`Wire`] for a struct, field by field.
macro_rules! wire_fields {
    ($($name:ident { $($field:ident),* $(,)? })*) => {$(
        impl $crate::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::codec::Wire::put(&self.$field, out);)*
            }
            fn get(input: &mut $crate::codec::Input<'_>) -> Result<Self, $crate::codec::Malformed> {
                Ok(Self { $($field: $crate::codec::Wire::get(input)?),* })
            }
        }
    )*};
}
pub(crate) use wire_fields;

wire_fields! {
    Attr { ino, mode, nlink, uid, gid, rdev, size, blocks, atime, mtime, ctime }
    SetAttr { mode, uid, gid, size, atime, mtime, ctime, kill_suidgid }
    Statfs { block_size, blocks, blocks_free, blocks_available, files, files_free }
    FileLock { start, end, kind, pid, owner, flock }
    RenameFlags { no_replace, exchange, whiteout }
    XattrFlags { create, replace, acl_kill_sgid }
}

/// Declares an enum whose values travel behind a number of one byte.
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident {
        $($(#[$vmeta:meta])* $tag:literal => $variant:ident { $($(#[$fmeta:meta])* $field:ident: $t:ty),* $(,)? },)*
    }) => {
        $(#[$meta])*
        pub enum $name {
            $($(#[$vmeta])* $variant { $($(#[$fmeta])* $field: $t),* },)*
        }

        impl $crate::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        out.push($tag);
                        $($crate::codec::Wire::put($field, out);)*
                    })*
                }
            }
            fn get(input: &mut $crate::codec::Input<'_>) -> Result<Self, $crate::codec::Malformed> {
                match <u8 as $crate::codec::Wire>::get(input)? {
                    $($tag => Ok(Self::$variant { $($field: $crate::codec::Wire::get(input)?),* }),)*
                    _ => Err($crate::codec::Malformed),
                }
            }
        }
    };
}
pub(crate) use wire_enum;
