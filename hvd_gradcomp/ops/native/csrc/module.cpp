// The Python module: unpacks addresses and sizes, lets other Python threads run, and calls the kernels.
// Who calls has made sure that the memory is there (ops/native/kernels.py): nothing here knows a framework's arrays.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cmath>
#include <new>
#include <vector>

#include "bits.h"
#include "frame.h"
#include "loops.h"
#include "positions.h"
#include "rounding.h"
#include "select.h"
#include "threads.h"
#include "values.h"

using namespace gradcomp;

namespace {

// "K" of PyArg_ParseTuple.
using Address = unsigned long long;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

template <typename Work>
auto without_gil(Work work) {
    PyThreadState* state = PyEval_SaveThread();
    auto result = [&] {
        const ExactArithmetic exact;
        return work();
    }();
    PyEval_RestoreThread(state);
    return result;
}

const char kCapsule[] = "hvd_gradcomp.candidates";

void delete_candidates(PyObject* capsule) {
    delete static_cast<Candidates*>(PyCapsule_GetPointer(capsule, kCapsule));
}

PyObject* look_(PyObject*, PyObject* arguments) {
    Address x, addend;
    Py_ssize_t size, wanted;
    if (!PyArg_ParseTuple(arguments, "KKnn:look", &x, &addend, &size, &wanted)) return nullptr;
    bool finite = false;
    Candidates* found = new (std::nothrow) Candidates;
    if (!found) return PyErr_NoMemory();
    *found = without_gil([&] {
        return look(at<float>(x), at<const float>(addend), static_cast<size_t>(size), static_cast<size_t>(wanted),
                    &finite);
    });
    if (!found->usable()) {
        delete found;
        return Py_BuildValue("(NO)", PyBool_FromLong(finite), Py_None);
    }
    PyObject* capsule = PyCapsule_New(found, kCapsule, delete_candidates);
    if (!capsule) {
        delete found;
        return nullptr;
    }
    return Py_BuildValue("(NN)", PyBool_FromLong(finite), capsule);
}

PyObject* top_positions_(PyObject*, PyObject* arguments) {
    Address x, out;
    Py_ssize_t size, k;
    PyObject* capsule;
    if (!PyArg_ParseTuple(arguments, "KnnOK:top_positions", &x, &size, &k, &capsule, &out)) return nullptr;
    const Candidates* known = nullptr;
    if (capsule != Py_None) {
        known = static_cast<const Candidates*>(PyCapsule_GetPointer(capsule, kCapsule));
        if (!known) return nullptr;
    }
    const size_t count = without_gil([&] {
        return top_positions(at<const float>(x), static_cast<size_t>(size), static_cast<size_t>(k), known,
                             at<int64_t>(out));
    });
    return PyLong_FromSize_t(count);
}

PyObject* kth_largest_(PyObject*, PyObject* arguments) {
    Address x;
    Py_ssize_t size, k;
    if (!PyArg_ParseTuple(arguments, "Knn:kth_largest", &x, &size, &k)) return nullptr;
    const float value = without_gil(
        [&] { return kth_largest(at<const float>(x), static_cast<size_t>(size), static_cast<size_t>(k)); });
    return PyFloat_FromDouble(value);
}

PyObject* encode_positions_(PyObject*, PyObject* arguments) {
    Address positions, out;
    Py_ssize_t count, size, capacity;
    if (!PyArg_ParseTuple(arguments, "KnnKn:encode_positions", &positions, &count, &size, &out, &capacity)) {
        return nullptr;
    }
    const uint64_t bytes = without_gil([&]() -> uint64_t {
        const int64_t* from = at<const int64_t>(positions);
        const PositionCode plan = plan_positions(from, static_cast<size_t>(count), static_cast<uint64_t>(size));
        if (!plan.valid || plan.bytes > static_cast<uint64_t>(capacity)) return 0;
        Writer writer{at<uint8_t>(out)};
        PositionWriter position_writer(plan, static_cast<size_t>(count), static_cast<uint64_t>(size), &writer);
        position_writer.put(from, static_cast<size_t>(count));
        position_writer.finish();
        return plan.bytes;
    });
    return PyLong_FromUnsignedLongLong(bytes);
}

PyObject* decode_positions_(PyObject*, PyObject* arguments) {
    Address data, out;
    Py_ssize_t left, size, count;
    if (!PyArg_ParseTuple(arguments, "KnnnK:decode_positions", &data, &left, &size, &count, &out)) return nullptr;
    const uint64_t used = without_gil([&]() -> uint64_t {
        Reader from{at<const uint8_t>(data), static_cast<uint64_t>(left)};
        PositionReader reader;
        if (!reader.open(&from, static_cast<uint64_t>(size), static_cast<uint64_t>(count)) || reader.all()) return 0;
        int64_t* to = at<int64_t>(out);
        uint32_t some[256];
        size_t found;
        do {
            if (!reader.next(some, 256, &found)) return 0;
            for (size_t i = 0; i < found; ++i) *to++ = some[i];
        } while (found);
        return static_cast<uint64_t>(left) - from.left;
    });
    return PyLong_FromUnsignedLongLong(used);
}

PyObject* encode_linear8_(PyObject*, PyObject* arguments) {
    Address values, decoded, out;
    Py_ssize_t count;
    int block_log2;
    if (!PyArg_ParseTuple(arguments, "KniKK:encode_linear8", &values, &count, &block_log2, &decoded, &out)) {
        return nullptr;
    }
    without_gil([&] {
        Writer writer{at<uint8_t>(out)};
        write_linear8(at<const float>(values), static_cast<size_t>(count), block_log2, at<float>(decoded), &writer);
        return 0;
    });
    Py_RETURN_NONE;
}

PyObject* encode_sparse8_(PyObject*, PyObject* arguments) {
    Address x, positions, out;
    Py_ssize_t size, count, capacity;
    int block_log2;
    if (!PyArg_ParseTuple(arguments, "KnKniKn:encode_sparse8", &x, &size, &positions, &count, &block_log2, &out,
                          &capacity)) {
        return nullptr;
    }
    const uint64_t bytes = without_gil([&] {
        return encode_sparse8(at<float>(x), static_cast<size_t>(size), at<const int64_t>(positions),
                              static_cast<size_t>(count), block_log2, at<uint8_t>(out),
                              static_cast<uint64_t>(capacity));
    });
    return PyLong_FromUnsignedLongLong(bytes);
}

PyObject* decode_add_(PyObject*, PyObject* arguments) {
    Address data, out;
    Py_ssize_t left, size;
    if (!PyArg_ParseTuple(arguments, "KnKn:decode_add", &data, &left, &out, &size)) return nullptr;
    FrameBytes frame{at<const uint8_t>(data), static_cast<uint64_t>(left), 0};
    const bool right =
        without_gil([&] { return decode_add(&frame, at<float>(out), static_cast<size_t>(size)); });
    return PyLong_FromUnsignedLongLong(right ? frame.used : 0);
}

PyObject* decode_mean_(PyObject*, PyObject* arguments) {
    PyObject* list;
    Address out;
    Py_ssize_t size;
    double divisor;
    if (!PyArg_ParseTuple(arguments, "OKnd:decode_mean", &list, &out, &size, &divisor)) return nullptr;
    const Py_ssize_t count = PyList_Size(list);
    if (count < 0) return nullptr;
    std::vector<FrameBytes> frames(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        Address data;
        Py_ssize_t left;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "Kn:decode_mean", &data, &left)) return nullptr;
        frames[static_cast<size_t>(i)] = {at<const uint8_t>(data), static_cast<uint64_t>(left), 0};
    }
    const bool right = without_gil([&] {
        return decode_mean(frames.data(), frames.size(), at<float>(out), static_cast<size_t>(size),
                           static_cast<float>(divisor));
    });
    if (!right) Py_RETURN_NONE;
    PyObject* used = PyList_New(count);
    for (Py_ssize_t i = 0; used && i < count; ++i) {
        PyList_SetItem(used, i, PyLong_FromUnsignedLongLong(frames[static_cast<size_t>(i)].used));
    }
    return used;
}

PyObject* checksum_(PyObject*, PyObject* arguments) {
    Address data;
    Py_ssize_t words;
    if (!PyArg_ParseTuple(arguments, "Kn:checksum", &data, &words)) return nullptr;
    const uint32_t sum =
        without_gil([&] { return loops().checksum(at<const uint8_t>(data), static_cast<size_t>(words), 0); });
    return PyLong_FromUnsignedLong(sum);
}

// The four bit functions differ in their names alone: source, count, width (ignored for single bits), destination.
template <typename Work>
PyObject* bits_(PyObject* arguments, const char* format, Work work) {
    Address from, to;
    Py_ssize_t count;
    int width;
    if (!PyArg_ParseTuple(arguments, format, &from, &count, &width, &to)) return nullptr;
    if (width < 0 || width > kWidest) {
        PyErr_Format(PyExc_ValueError, "a width of %d bits, expected 0 to %d", width, kWidest);
        return nullptr;
    }
    without_gil([&] {
        work(from, static_cast<size_t>(count), width, to);
        return 0;
    });
    Py_RETURN_NONE;
}

PyObject* pack_uint_(PyObject*, PyObject* arguments) {
    return bits_(arguments, "KniK:pack_uint", [](Address from, size_t count, int width, Address to) {
        pack_uint(at<const int64_t>(from), count, width, at<uint8_t>(to));
    });
}

PyObject* unpack_uint_(PyObject*, PyObject* arguments) {
    return bits_(arguments, "KniK:unpack_uint", [](Address from, size_t count, int width, Address to) {
        unpack_uint(at<const uint8_t>(from), count, width, at<int64_t>(to));
    });
}

PyObject* pack_bits_(PyObject*, PyObject* arguments) {
    return bits_(arguments, "KniK:pack_bits", [](Address from, size_t count, int, Address to) {
        pack_bits(at<const uint8_t>(from), count, at<uint8_t>(to));
    });
}

PyObject* unpack_bits_(PyObject*, PyObject* arguments) {
    return bits_(arguments, "KniK:unpack_bits", [](Address from, size_t count, int, Address to) {
        unpack_bits(at<const uint8_t>(from), count, at<uint8_t>(to));
    });
}

PyObject* instruction_sets_(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (const Loops* const* each = available_loops(); names && *each; ++each) {
        PyObject* name = PyUnicode_FromString((*each)->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyObject* instruction_set_(PyObject*, PyObject*) { return PyUnicode_FromString(loops().name); }

PyObject* use_instruction_set_(PyObject*, PyObject* arguments) {
    const char* name;
    if (!PyArg_ParseTuple(arguments, "s:use_instruction_set", &name)) return nullptr;
    if (!use_loops(name)) {
        PyErr_Format(PyExc_ValueError, "this processor has no kernels called '%s'", name);
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* threads_(PyObject*, PyObject*) { return PyLong_FromSize_t(threads()); }

PyObject* use_threads_(PyObject*, PyObject* arguments) {
    Py_ssize_t count;
    if (!PyArg_ParseTuple(arguments, "n:use_threads", &count)) return nullptr;
    if (count < 1) {
        PyErr_Format(PyExc_ValueError, "%zd threads, expected at least 1", count);
        return nullptr;
    }
    use_threads(static_cast<size_t>(count));
    Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"look", look_, METH_VARARGS, nullptr},
    {"top_positions", top_positions_, METH_VARARGS, nullptr},
    {"kth_largest", kth_largest_, METH_VARARGS, nullptr},
    {"encode_positions", encode_positions_, METH_VARARGS, nullptr},
    {"decode_positions", decode_positions_, METH_VARARGS, nullptr},
    {"encode_linear8", encode_linear8_, METH_VARARGS, nullptr},
    {"encode_sparse8", encode_sparse8_, METH_VARARGS, nullptr},
    {"decode_add", decode_add_, METH_VARARGS, nullptr},
    {"decode_mean", decode_mean_, METH_VARARGS, nullptr},
    {"checksum", checksum_, METH_VARARGS, nullptr},
    {"pack_uint", pack_uint_, METH_VARARGS, nullptr},
    {"unpack_uint", unpack_uint_, METH_VARARGS, nullptr},
    {"pack_bits", pack_bits_, METH_VARARGS, nullptr},
    {"unpack_bits", unpack_bits_, METH_VARARGS, nullptr},
    {"instruction_sets", instruction_sets_, METH_NOARGS, nullptr},
    {"instruction_set", instruction_set_, METH_NOARGS, nullptr},
    {"use_instruction_set", use_instruction_set_, METH_VARARGS, nullptr},
    {"threads", threads_, METH_NOARGS, nullptr},
    {"use_threads", use_threads_, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&kModule); }
